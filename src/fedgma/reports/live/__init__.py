"""A local page that shows the runs of folders while they are written."""
