"""Changes of finished sets: tables of samples, views, columns, versions; and sets of tars that
others made.
"""
