"""A user's own code and data in an experiment: files, names in the settings, tasks, and defaults that fit the data."""
