"""fusion/kernels"""
