"""Changes of finished sets: catalogues, views, columns, versions; and sets of tars that others
made.
"""
