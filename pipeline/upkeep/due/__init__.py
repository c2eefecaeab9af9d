"""What has changed since a recipe was last published, and the state of a recipe between rounds."""
