"""Local training: `lanes` trains many clients at once, `loop` is the plain reference with the same results."""
