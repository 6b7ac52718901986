"""Blanks between words, in a module without imports for programs that must start fast."""

from __future__ import annotations

BLANKS = " \t\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
