"""What a recipe says, read strictly: schema, reading, faults with their place."""
