// What sanitizers see in libraries that were built without them.

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

#ifdef __SANITIZE_ADDRESS__

extern "C" const char* __lsan_default_suppressions() {
  // What OpenSSL keeps for each thread's errors goes with the thread's exit,
  // which the sanitizer may come before.
  return "leak:CRYPTO_zalloc\n";
}

#endif
