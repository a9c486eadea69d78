"""The training loop that raydist.fit is: samples, steps, precision, schedules, evaluation. (rank side)"""
