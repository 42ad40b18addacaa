"""Several engines behind one, and requests that continue after an abort."""
