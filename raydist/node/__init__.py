"""What runs on every node: the actor of each rank, the fork server, the store, and the rank process. (actor)"""
