"""doctor, explain, report, sweep."""
