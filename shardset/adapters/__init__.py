"""A stream as other libraries take it; each module needs one optional library."""
