/* Loads and unloads the library named on the command line a hundred times, calling it each time. */

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef int (*get_version)(int *);

int main(int argc, char **argv) {
  int i;
  for (i = 0; argc == 2 && i < 100; i++) {
    get_version call;
    int version = 0;
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    void *symbol = library ? dlsym(library, i % 2 ? "ncclGetVersion" : "pncclGetVersion") : NULL;
    if (!symbol) {
      printf("round %d: %s\n", i, dlerror());
      return 1;
    }
    memcpy(&call, &symbol, sizeof call);
    if (call(&version) != 0 || version != 22809 || call(NULL) != 4 || dlclose(library) != 0) {
      printf("round %d: wrong answer, version %d\n", i, version);
      return 1;
    }
  }
  printf("%d rounds\n", i);
  return i == 100 ? 0 : 1;
}
