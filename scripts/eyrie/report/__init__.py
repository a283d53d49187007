"""The report: one HTML file that tells a build's evidence and opens without a network."""
