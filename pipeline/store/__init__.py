"""Results of stages on disk, found again by fingerprint; runs, locks, buckets and the remote tier."""
