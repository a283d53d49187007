"""What runs the target: engines answer prompts and capture states, and know nothing of datasets."""
