"""The training loop of raydist.fit: samples, steps, precision, schedules, evaluation. (rank side)"""
