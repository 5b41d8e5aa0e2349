"""Whether an engine's steps are compiled and captured, or run as they are."""

# As a user has it, since a warning that is an error makes a step run as it is; but hints on speed must not come up.
ALL_BUT_HINTS = ("default", "error:There is a performance drop", "error:TensorFloat32 tensor cores")


def assert_compiled_and_captured(caplog):
    """An engine whose step cannot be compiled or captured goes on without, and says so in the log."""
    assert [record.message for record in caplog.records if record.name.startswith("fedgma")] == []
