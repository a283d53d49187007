"""Writers of the raw sample files: one module a dataset, phrases beside them in text files."""
