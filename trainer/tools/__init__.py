"""doctor, explain, report."""
