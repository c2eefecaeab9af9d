"""How good, how fast, and good enough?"""
