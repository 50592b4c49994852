"""Tools for whoever writes passes: tester, bisection, minifier, scaffold, replay."""
