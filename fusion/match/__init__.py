"""fusion/match"""
