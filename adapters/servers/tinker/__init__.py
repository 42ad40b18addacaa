"""The Tinker API: training and sampling that a client drives, over HTTP."""
