"""The verb `export`: side files of other readers, one module a reader. A new one also needs a line in FORMATS."""
