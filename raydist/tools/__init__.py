"""Jobs and questions beside the main one: `python -m raydist.tools.NAME`. (driver)"""
