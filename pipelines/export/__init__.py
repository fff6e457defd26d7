"""The verb `export`: side files of other readers, which `write` lists."""
