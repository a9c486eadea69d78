"""Look into a run and steer it from another process: the driver's part. (driver)

Gets requests of the commands `raydist ranks`, `stacks`, … over a Unix socket (messages/operate.py),
asks the agents of the ranks, and replies.
"""
