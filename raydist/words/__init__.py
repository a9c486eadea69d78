"""What a person types -> the Job: composed by Hydra, checked, refused in plain words. (driver)"""
