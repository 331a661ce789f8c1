"""The built-in tasks: a calculator, a directory of people, a calendar and a unit converter."""
