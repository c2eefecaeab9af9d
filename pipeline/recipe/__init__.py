"""What a recipe says, read strictly: schema, reading, faults with their place.

loaded = load_recipe("llama8b-ptpc")
refuse(check(loaded, config=config))
"""
