"""The way to the controller: reports out, directives and orders back."""
