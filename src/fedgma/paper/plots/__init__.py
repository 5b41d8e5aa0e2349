"""Pictures of the paper beside ours."""
