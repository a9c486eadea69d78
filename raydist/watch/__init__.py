"""Readers of the event stream: what a person sees of a run. (driver)"""
