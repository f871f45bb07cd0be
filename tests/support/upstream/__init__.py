"""What the tests take from upstream: its sources, its two conversion steps, goldens of both."""
