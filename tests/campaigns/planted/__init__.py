"""Faults that cost time, planted in the reference trainer: are they named, and their gain?"""
