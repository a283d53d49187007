"""A real engine serves the drafter: what is asked of it, what it tells, and what becomes of that."""
