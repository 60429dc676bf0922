"""The studies, each in a file of its own: a claim and its source, settings, tests, and the function that measures."""
