# A package run with -m: relative imports, a file of the package, __main__'s own name.
#> [files]
#> "package/__init__.py" = ""
#> "package/models/__init__.py" = "from .linear import NAME\n"
#> "package/models/linear.py" = "NAME = 'linear'\n"
#> "package/words.txt" = "hello"
#> "package/train.py" = """
#> import importlib.resources, os, sys
#> from . import models
#> from .models.linear import NAME
#> from package.models import linear
#> if __name__ == '__main__':
#>     print(os.environ['RANK'], models.NAME, linear.NAME is NAME, importlib.resources.read_text('package', 'words.txt'),
#>           __spec__.name, sys.argv[1:])
#> """
#> [run]
#> flags = ["--nproc", "2", "-m"]
#> script = ["package.train", "--epochs", "2"]
#> long = true
#> lines = ["0 linear True hello package.train ['--epochs', '2']", "1 linear True hello package.train ['--epochs', '2']"]
