"""EAGLE-3: the drafter, its training-time test, its vocabulary, and the checkpoint that engines load."""
