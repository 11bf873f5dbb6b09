"""`make bench`: what is measured and how; see measure.py."""
