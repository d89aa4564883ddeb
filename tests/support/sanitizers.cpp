// What ThreadSanitizer sees in libraries that were built without it.

#ifdef __SANITIZE_THREAD__

extern "C" const char* __tsan_default_suppressions() {
  // The libraries of UCX unlock their mutexes in destructors that run after
  // those of the sanitizer; and what UCX copies between ranks of one process
  // is ordered by its own atomics, which the sanitizer does not see.
  return "mutex:_dl_call_fini\n"
         "called_from_lib:libucp.so\n"
         "called_from_lib:libuct.so\n"
         "called_from_lib:libucs.so\n"
         "called_from_lib:libucm.so\n"
         "called_from_lib:libuct_cma.so\n";
}

#endif
