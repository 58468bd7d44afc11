# -*- coding: latin-1 -*-
# A source in another encoding; threads and atexit at the end.
#> [run]
#> lines = ["caf\u00e9 in a thread", "at exit"]
#> long = true
import atexit
import threading

atexit.register(print, "at exit")
threading.Thread(target=lambda: (threading.Event().wait(0.2), print("café in a thread"))).start()
