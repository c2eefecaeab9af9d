"""What has changed since a recipe was last published."""
