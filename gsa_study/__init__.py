"""Studies: runs that differ in a few fields, trained one after another or side by side, and compared."""
