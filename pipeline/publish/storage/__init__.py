"""A bucket as a place to publish to: S3, what is compatible with it, and any file system that fsspec reaches."""

from pipeline.publish.storage.target import StorageTarget

__all__ = ["StorageTarget"]
