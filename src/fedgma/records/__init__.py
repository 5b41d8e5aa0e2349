"""Run folders: one format, one writer, one reader."""
