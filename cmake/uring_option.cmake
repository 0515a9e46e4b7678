# MOESAIC_URING=AUTO|ON|OFF -> MOESAIC_WITH_URING and the target PkgConfig::URING. Without it the file tier reads and
# writes through a few threads.
set(MOESAIC_URING AUTO CACHE STRING "io_uring for the file tier, through liburing: AUTO (when it is found), ON, OFF")
set(MOESAIC_WITH_URING OFF)
if(NOT MOESAIC_URING STREQUAL "OFF")
  pkg_check_modules(URING QUIET IMPORTED_TARGET liburing>=2.2)  # io_uring_sqe_set_data64
  if(URING_FOUND)
    set(MOESAIC_WITH_URING ON)
  elseif(MOESAIC_URING STREQUAL "ON")
    message(FATAL_ERROR "MOESAIC_URING=ON, but pkg-config does not find liburing (2.2 or newer). "
                        "Install liburing-dev (scripts/install_packages.sh), or use MOESAIC_URING=OFF.")
  endif()
endif()
if(MOESAIC_WITH_URING)
  message(STATUS "File tier: liburing ${URING_VERSION}")
else()
  message(STATUS "File tier: pread and pwrite by threads (liburing-dev is missing, or MOESAIC_URING=OFF)")
endif()
