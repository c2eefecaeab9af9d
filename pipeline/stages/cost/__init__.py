"""What a stage will take, before it takes it: how much it moves, how fast this machine moves it, and so how long."""
