"""The report of a bench: one HTML file that needs nothing but itself."""
