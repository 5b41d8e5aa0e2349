"""What users have: arrays, files, folders, tables, text and objects in Python, understood as data sets."""
