/* uml-fp.c: User-mode Linux before 6.11 keeps less of the floating point state than processors with AMX have, and the kernel refuses to set a part of it:
   what is missing is filled in from what the process has. For LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/uio.h>

#define XSTATE 0x202

long ptrace(enum __ptrace_request request, ...) {
  static long (*real)(enum __ptrace_request, ...);
  static char full[1 << 16];
  va_list args;
  va_start(args, request);
  int pid = va_arg(args, int);
  void *addr = va_arg(args, void *), *data = va_arg(args, void *);
  va_end(args);
  if (!real) real = dlsym(RTLD_NEXT, "ptrace");
  long done = real(request, pid, addr, data);
  if (done == 0 || request != PTRACE_SETREGSET || addr != (void *)XSTATE) return done;
  struct iovec *part = data, all = {full, sizeof full};
  if (real(PTRACE_GETREGSET, pid, addr, &all) != 0 || all.iov_len < part->iov_len) return -1;
  memcpy(full, part->iov_base, part->iov_len);
  return real(PTRACE_SETREGSET, pid, addr, &all);
}
