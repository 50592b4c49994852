"""fusion/ops"""
