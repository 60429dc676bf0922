"""What is published about tying, put to the test: a study is data and one function.

May import what `study` may. Studies are found by name in `catalogue`.
"""
